from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.gates"

PART = Part(
    name="zoo gates",
    summary="Other trust regions and corrections of ratios.",
    presets={
        "+mis": f"{HERE}.corrections:mis",
        "+opsm": f"{HERE}.corrections:opsm",
        "+seq-mask-tis": f"{HERE}.corrections:seq_mask_tis",
        "+seq-tis": f"{HERE}.corrections:seq_tis",
        "dppo-kl": f"{HERE}.presets:dppo_kl",
        "dppo-topk": f"{HERE}.presets:dppo_topk",
        "dppo-tv": f"{HERE}.presets:dppo_tv",
        "gmpo": f"{HERE}.presets:gmpo",
        "kimi": f"{HERE}.presets:kimi",
        "luspo": f"{HERE}.presets:luspo",
        "minirl": f"{HERE}.presets:minirl",
        "sapo": f"{HERE}.presets:sapo",
        "vespo": f"{HERE}.presets:vespo",
    },
)
