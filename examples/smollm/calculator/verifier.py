"""Right if the answer names the product, such as 3,225 or 3225."""

import re
from typing import Any


def verify(task: dict[str, Any], result: str) -> float:
    return float(str(task["answer"]) in re.findall(r"\d+", result.replace(",", "")))
