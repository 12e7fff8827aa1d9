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
    print(f"{case.case} {case.value:.3f} (at most {case.goal}): {case.note}", flush=True)
