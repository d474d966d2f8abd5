"""The score: half for the right desk, half for the rules of the line."""

import re
from statistics import fmean
from typing import Any

from agentrl import Reward


def verify(task: dict[str, Any], result: dict[str, str]) -> list[Reward]:
    month, cents = task["expected"]["line"][:-1].split(";")
    line, clean = result["line"], "arr" not in result["line"]
    fields = [field.strip() for field in re.split("[;,]", line.removesuffix("#"))]
    kept = {
        "cents": fields[1:] == [cents] and clean,
        "sep": line.startswith(f"{month};") and clean,
        "end": line.endswith("#"),
    }
    wrong = [f"rule {rule} is not kept." for rule, good in kept.items() if not good]
    note = " ".join([*wrong, *([] if clean else ["there is chatter in the answer."])])
    desk = float(result["desk"] == task["expected"]["desk"])
    return [Reward(value=(desk + fmean(kept.values())) / 2, note=note or "fine.")]
