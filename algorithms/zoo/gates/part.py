from agentrl.base.parts import Part

HERE = "agentrl.algorithms.zoo.gates"

PART = Part(
    name="zoo gates",
    summary="Other trust regions and corrections of ratios.",
    presets={
        "+behaviour": f"{HERE}.corrections:behaviour",
        "+decoupled": f"{HERE}.corrections:decoupled",
        "+icepop": f"{HERE}.corrections:icepop",
        "+mis": f"{HERE}.corrections:mis",
        "+opsm": f"{HERE}.corrections:opsm",
        "+seq-mask-tis": f"{HERE}.corrections:seq_mask_tis",
        "+seq-tis": f"{HERE}.corrections:seq_tis",
        "+tis": f"{HERE}.corrections:tis",
        "cispo": f"{HERE}.presets:cispo",
        "dppo-kl": f"{HERE}.presets:dppo_kl",
        "dppo-topk": f"{HERE}.presets:dppo_topk",
        "dppo-tv": f"{HERE}.presets:dppo_tv",
        "gmpo": f"{HERE}.presets:gmpo",
        "gspo": f"{HERE}.presets:gspo",
        "kimi": f"{HERE}.presets:kimi",
        "luspo": f"{HERE}.presets:luspo",
        "minirl": f"{HERE}.presets:minirl",
        "sapo": f"{HERE}.presets:sapo",
        "scalerl": f"{HERE}.presets:scalerl",
        "vespo": f"{HERE}.presets:vespo",
    },
)
