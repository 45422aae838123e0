# agentloop with its inspector, PostgreSQL and MCP; untried so far.
#
#   docker build -t agentloop .
#   docker run --rm -v "$PWD/runs:/agent/runs" agentloop train quickstart
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /agent
COPY . /source
RUN pip install --no-cache-dir -c /source/constraints.txt "/source[inspect,postgres,mcp]" && rm -rf /source
ENTRYPOINT ["agentloop"]
