"""Tools of MCP servers: listed when a run starts, called by its episodes, ended with them."""
