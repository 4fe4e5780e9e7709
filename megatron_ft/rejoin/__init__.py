"""Rejoin: vacant slots are filled again without a restart and without a stall."""
