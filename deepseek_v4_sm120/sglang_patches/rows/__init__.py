"""Parts of the table: the rows of operators with more than a few targets."""
