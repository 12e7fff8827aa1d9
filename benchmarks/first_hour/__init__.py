"""NAME first_hour: what people bring in their first hour ends as it should."""
