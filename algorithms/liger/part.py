from agentrl.base.parts import Part

PART = Part(
    name="liger",
    summary="Liger Kernel's norms and gated activations, on a GPU.",
    patches={"learner.liger_kernel": "agentrl.algorithms.liger.kernels:use_liger"},
)
