"""A LangChain chain over a service: a prompt, the model, a parser. The same chain streams, and runs many inputs.

python langchain_chain.py [URL] [MODEL]
"""

import sys

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

url, model = sys.argv[1:] or ("http://127.0.0.1:8000/v1", "smollm2")
prompt = ChatPromptTemplate([("system", "You answer in one word."), ("user", "The opposite of {word}?")])
chain = prompt | ChatOpenAI(base_url=url, api_key="none", model=model, temperature=0, max_tokens=8) | StrOutputParser()

for piece in chain.stream({"word": "hot"}):
    print(piece, end="", flush=True)
print()
# Three requests at once are one batch of the service.
print(chain.batch([{"word": word} for word in ("hot", "up", "old")]))
