"""Steps the scheduler and the runner, and feeds text in and out."""
