"""The planner: from memory budgets to where everything lives, with predicted bytes and seconds."""
