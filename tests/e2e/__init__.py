"""End to end: whole runs from the command line, and real servers; run by .ci/run."""
