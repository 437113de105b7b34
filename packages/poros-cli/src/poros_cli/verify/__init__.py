"""`poros verify`: whose run it is, its processes, what is said and written."""
