from agentrl.base.parts import Part

HERE = "agentrl.algorithms.prompts"

PART = Part(
    name="prompt search",
    summary="Better prompts for an agent that stays as it is, alone or alternating with training.",
    uses=("chat-completions", "evaluation", "view"),
    tables={"prompts": f"{HERE}.table:PromptsConfig"},
    commands={
        "prompts": f"{HERE}.command:prompts",
        "algorithm prompts": f"{HERE}.command:search_process",
    },
    training={"prompts": f"{HERE}.training:join"},
    candidates={"prompts": f"{HERE}.schedule:candidate_in_use"},
    gateway={"prompts": f"{HERE}.gateway:candidate_prompts"},
    pages={"prompts": f"{HERE}.pages:SearchPage", "prompt": f"{HERE}.pages:CandidatePage"},
)
