from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.baselines"

PART = Part(
    name="zoo baselines",
    summary="Other baselines, scales and rewards of groups.",
    presets={
        "agl-v0": f"{HERE}.grpo:agl_v0",
        "agl-v1": f"{HERE}.grpo:agl_v1",
        "best-of": f"{HERE}.grpo:best_of",
        "dapo": f"{HERE}.grpo:dapo",
        "dr-grpo": f"{HERE}.grpo:dr_grpo",
        "gdpo": f"{HERE}.grpo:gdpo",
        "gpg": f"{HERE}.reinforce:gpg",
        "liteppo": f"{HERE}.grpo:liteppo",
        "maxrl": f"{HERE}.reinforce:maxrl",
        "opo": f"{HERE}.reinforce:opo",
        "pass-at-k": f"{HERE}.grpo:pass_at_k",
        "reinforce++-baseline": f"{HERE}.reinforce:baseline",
        "remax": f"{HERE}.reinforce:remax",
    },
)
