"""A server that speaks MCP over standard input and output: the price list of a shop, and a cart."""

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

PRICES = {"pen": 3, "book": 12, "lamp": 25, "chair": 60}
server = MCPServer("shop", log_level="ERROR")
cart: list[int] = []  # of this process, and so of one rollout


@server.tool()
def price(item: str) -> int:
    """The price of an item in euros. There are pens, books, lamps and chairs."""
    if item not in PRICES:
        raise ToolError(f"there is no '{item}', only {', '.join(PRICES)}")
    return PRICES[item]


@server.tool()
def add_to_cart(item: str, number: int) -> int:
    """Put items into the cart; returns the sum of the cart in euros."""
    cart.append(price(item) * number)
    return sum(cart)


if __name__ == "__main__":
    server.run("stdio")
