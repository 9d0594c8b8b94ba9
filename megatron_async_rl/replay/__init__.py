"""`mar replay`: repeats the steps of a run on its recorded samples."""
