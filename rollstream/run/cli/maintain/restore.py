"""`rollstream restore BACKUP DIR`: verifies a backup, makes a run of it in the empty folder DIR,
prints its recovery point, and audits it; its log and store must be empty too.
"""

import argparse
import json
import tempfile
from pathlib import Path

from rollstream.keep.backup import open_backup
from rollstream.keep.restore import plan_restore, restore
from rollstream.look.query.own_runs import remember_urls
from rollstream.printable import shell_command
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.cli.commands import choose_parser
from rollstream.run.cli.maintain import audit
from rollstream.run.cli.maintain.backup import recovery_lines, show_part
from rollstream.run.signals import progress_line, warn


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "backups/quickstart-0 runs/restored",
        "backups/quickstart-1 runs/restored-1 --set metrics.port=0 --json",
    )
    command.add_argument("backup", metavar="BACKUP", help="a backup: its folder or URL")
    command.add_argument("folder", metavar="DIR", help="a new or empty folder for the run")
    command.add_overrides("override a setting, e.g. bus=URL with another host; names must stay")
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    folder = Path(arguments.folder)
    source = open_backup(arguments.backup, must_exist=True)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            plan = plan_restore(
                source, arguments.backup, folder, arguments.overrides, Path(scratch), show_part
            )
        restore(plan, show_part)
    finally:
        progress_line("")
    remember_urls(url for url in plan.urls if not url.startswith(("file:", "sqlite:")))
    backup = plan.backup
    if plan.left_out:
        more = f" and {len(plan.left_out) - 8} more" if len(plan.left_out) > 8 else ""
        warn(f"left out, because no run writes them: {', '.join(plan.left_out[:8])}{more}")
    if arguments.json:
        line = {
            "run": backup.run, "id": backup.id, "folder": str(plan.folder.path),
            "step": backup.step, "checkpoint": backup.checkpoint,
        }  # fmt: skip
        print(json.dumps(line))
    else:
        print(f"restored {backup.run} ({backup.id}) to {plan.folder.path}")
        print("\n".join(recovery_lines(backup)))
    words = [str(folder), "--whole", *(["--json"] if arguments.json else [])]
    audit_code = audit.main(choose_parser(["audit"])[0].parse(words))
    if not arguments.json:
        print(f"start it with: {shell_command('run', arguments.folder)}")
    return 1 if audit_code == audit.VIOLATED else 0
