from agentrl.base.parts import Part

PART = Part(
    name="teacher servers",
    summary="Imitate a teacher behind a server instead of one in memory.",
    uses=("chat-completions",),
    training={"teacher.upstream": "agentrl.algorithms.teachers.training:join"},
)
