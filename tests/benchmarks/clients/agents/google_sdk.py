from google import genai
from google.genai import types
from play import KEY, ROOT, SYSTEM, add, play

client = genai.Client(api_key=KEY, http_options=types.HttpOptions(base_url=ROOT))


def talk(questions, streamed):
    thinking = types.ThinkingConfig(include_thoughts=True)
    config = types.GenerateContentConfig(
        system_instruction=SYSTEM, tools=[add], thinking_config=thinking
    )
    chat = client.chats.create(model="policy", config=config)
    for question in questions:
        if streamed:
            for _ in chat.send_message_stream(question):
                pass
        else:
            chat.send_message(question)


play(talk)
