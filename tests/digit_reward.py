"""A reward for small runs that varies from the first iteration on: the share of digits in the response."""


def score(prompt: str, response: str, answer: str) -> float:
    """Digits / characters; 0 for nothing."""
    return sum(c.isdigit() for c in response) / max(len(response), 1)
