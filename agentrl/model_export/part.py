from agentrl.base.parts import Part

HERE = "agentrl.model_export"

PART = Part(
    name="model export",
    summary="A trained model for transformers, vLLM, Ollama or the Hugging Face hub.",
    commands={"export model": f"{HERE}.command:model"},
)
