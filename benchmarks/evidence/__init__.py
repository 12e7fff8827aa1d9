"""What the rows of `studies/evidence/` show, as cases."""
