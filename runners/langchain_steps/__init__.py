"""Steps of LangChain and LangGraph agents as spans, by whose names calls have roles."""
