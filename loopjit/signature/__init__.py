"""When two Python functions, with all that they capture, are the same. See ``README.rst`` here."""
