"""Right if the price is the only number of the answer."""

import re
from typing import Any


def verify(task: dict[str, Any], result: str) -> float:
    return float(re.findall(r"\d+", result) == [str(task["answer"])])
