"""`python -m benchmarks.soak --steps 1000 --folder DIR` is the soak run at another length; its
folder stays.
"""

import argparse
from pathlib import Path

from benchmarks.soak.soak import STEPS_QUICK, soaked

parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
parser.add_argument("--steps", type=int, default=STEPS_QUICK, help="steps of the run")
parser.add_argument("--folder", type=Path, required=True, help="new folder, which stays")
chosen = parser.parse_args()
for case in soaked(chosen.folder, chosen.steps):
    value = f"{case.value:.3f} {case.unit}"
    if case.ratio is not None:
        value += f", {case.ratio:.3f} × {case.reference} ({case.reference_value:.1f} {case.unit})"
    met = "met" if case.met else "MISSED"
    print(f"{case.case} {value} (at most {case.goal:g}, {met}): {case.note}", flush=True)
