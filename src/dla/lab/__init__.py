"""Small experiments: tasks with exact answers on which memories can be compared."""
