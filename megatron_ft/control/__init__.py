"""Elastic by hand: a running job answers questions and takes orders over a socket file."""
