"""Processes: MPI with fault tolerance, from the launch to the repaired world."""
