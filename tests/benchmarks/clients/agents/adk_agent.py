from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.runners import InMemoryRunner
from google.genai import types
from play import SYSTEM, add, play


async def talk(questions, streamed):
    agent = Agent(name="solver", model="gemini-policy", instruction=SYSTEM, tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="u")
    mode = RunConfig(streaming_mode=StreamingMode.SSE if streamed else StreamingMode.NONE)
    for question in questions:
        message = types.Content(role="user", parts=[types.Part(text=question)])
        async for event in runner.run_async(
            user_id="u", session_id=session.id, new_message=message, run_config=mode
        ):
            if event.error_code:
                raise RuntimeError(f"{event.error_code}: {event.error_message}")


play(talk)
