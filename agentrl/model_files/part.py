from agentrl.base.parts import Part

HERE = "agentrl.model_files"

PART = Part(
    name="model files",
    summary="Models of other tools as Hugging Face folders, and trained ones for other tools.",
    uses=("checkpoints", "lora"),
    commands={"export model": f"{HERE}.export:model", "model": f"{HERE}.command:model"},
)
