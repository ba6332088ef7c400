"""One module for each file of the top-level migrations/, which is the source; a test finds out when one is missing."""
