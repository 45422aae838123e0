from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def keep(text: str) -> int:
    """Keep a note, and say how many there are."""
    notes.append(text)
    return len(notes)


@server.tool()
def read() -> list[str]:
    """Read all notes."""
    return notes


server.run("stdio")
