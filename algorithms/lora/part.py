from agentrl.base.parts import Part

HERE = "agentrl.algorithms.lora"

PART = Part(
    name="lora",
    summary="Policies as adapters of low rank on one frozen base, which may be quantised.",
    adapters={"policy.lora": f"{HERE}.loading:load_adapted"},
)
