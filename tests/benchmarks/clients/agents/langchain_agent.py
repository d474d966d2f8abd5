from play import ARGUMENT, KEY, ROOT, SYSTEM, add, play


def model():
    if ARGUMENT == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model="policy", thinking={"type": "adaptive"}, max_tokens=2048)
    if ARGUMENT == "google":
        from langchain_google_genai import ChatGoogleGenerativeAI

        return ChatGoogleGenerativeAI(
            model="policy", google_api_key=KEY, base_url=ROOT, include_thoughts=True
        )
    from langchain_openai import ChatOpenAI

    if ARGUMENT == "responses":
        return ChatOpenAI(model="policy", use_responses_api=True, output_version="responses/v1")
    return ChatOpenAI(model="policy")


def talk(questions, streamed):
    if ARGUMENT == "deep":
        from deepagents import create_deep_agent

        agent = create_deep_agent(model=model(), tools=[add], system_prompt=SYSTEM)
    else:
        from langchain.agents import create_agent

        named = {"name": "solver"} if ARGUMENT == "named" else {}
        agent = create_agent(model(), [add], system_prompt=SYSTEM, **named)
    messages = []
    for question in questions:
        asked = {"messages": [*messages, {"role": "user", "content": question}]}
        if streamed:
            for mode, piece in agent.stream(asked, stream_mode=["messages", "values"]):
                if mode == "values":
                    messages = piece["messages"]
        else:
            messages = agent.invoke(asked)["messages"]


play(talk)
