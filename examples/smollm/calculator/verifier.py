"""Right if the last number of the answer is the product, such as 3,225 or 3225."""

import re
from typing import Any


def verify(task: dict[str, Any], result: str) -> float:
    return float(re.findall(r"\d+", result.replace(",", ""))[-1:] == [str(task["answer"])])
