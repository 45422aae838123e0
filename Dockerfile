# agentloop with its inspector, PostgreSQL and MCP. Not tried on this project's machines, which have no docker.
#
#   docker build -t agentloop .
#   docker run --rm -v "$PWD/runs:/work/runs" agentloop train quickstart
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY . /source
RUN pip install --no-cache-dir -c /source/constraints.txt "/source[inspect,postgres,mcp]" && rm -rf /source
ENTRYPOINT ["agentloop"]
