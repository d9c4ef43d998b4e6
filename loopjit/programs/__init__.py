"""When two jaxprs are the same program, and the table that keeps one of each."""
