"""All cases of the first hour, from the modules beside this one."""

from testbed.first_hour import (
    brought_data,
    checked_runs,
    output_cases,
    reader_cases,
    returned_rewards,
)
from testbed.first_hour.advice import ADVICE_CASES
from testbed.first_hour.case import FirstHourCase
from testbed.first_hour.proxies import PROXY_CASES

CASES: tuple[FirstHourCase, ...] = (
    *ADVICE_CASES,
    *PROXY_CASES,
    *output_cases.CASES,
    *reader_cases.CASES,
    *brought_data.CASES,
    *returned_rewards.CASES,
    *checked_runs.CASES,
)
