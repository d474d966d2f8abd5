from agentrl.base.parts import Part

PART = Part(
    name="chat-completions",
    summary="Asks models outside of rollouts, for judges, teachers and the search of prompts.",
)
