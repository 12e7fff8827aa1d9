"""Confines DuckDB to one run: a query, from any author, reads the run's archived files and no other
file, opens no connection, and loads no extension.
"""

import os
from pathlib import Path

import duckdb

from rollstream.look.query.archive_files import archive_folder, sql_literal
from rollstream.look.query.locate import RunLocation


def confine(connection: duckdb.DuckDBPyConnection, location: RunLocation) -> None:
    """The connection reads below the run's archive, or the cache of a remote one, alone. Its
    settings cannot be changed afterwards.
    """
    folder = archive_folder(location.store)
    # A link to another disk is resolved before a file is read, so where it leads is allowed, too.
    allowed = [Path(os.path.realpath(folder))]
    if location.folder is not None:
        allowed += location.files.also
    listed = ", ".join(sql_literal(f"{path}/") for path in allowed)
    close_settings(connection, f"SET allowed_directories = [{listed}]")


def close_settings(connection: duckdb.DuckDBPyConnection, allowed: str) -> None:
    """Runs the setting `allowed`, refuses everything else outside of the database, and locks the
    settings.
    """
    for setting in (
        allowed,
        "SET python_enable_replacements = false",  # a name in SQL is no variable of this program
        "SET enable_external_access = false",
        "SET lock_configuration = true",
    ):
        connection.execute(setting)
