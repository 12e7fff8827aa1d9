"""The sheet of a report as HTML, without the page around it."""

from rollstream.look.report.elements import html_of
from rollstream.look.report.history import RunHistory
from rollstream.look.report.sheet import run_sheet
from rollstream.look.report.summary import RunSummary


def report_html(history: RunHistory, summary: RunSummary) -> str:
    return html_of(*run_sheet(history, summary))
