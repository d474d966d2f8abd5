from agentrl.base.parts import Part

HERE = "agentrl.algorithms.engines.vllm"

PART = Part(
    name="vLLM",
    summary="Policies served by vLLM: a child process, or servers that run already.",
    needs=("preflight",),
    outputs=("vllm", "servers"),
    kinds={"engine.vllm": f"{HERE}.table:VllmEngineConfig"},
    engines={"vllm": f"{HERE}.factory:vllm_server"},
)
