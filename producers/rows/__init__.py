"""Files of rows, as users bring them: `data_files` finds those of a data set, `row_files` reads
JSON, JSON Lines, Parquet, and with `csv_table` CSV, plain or compressed.
"""
