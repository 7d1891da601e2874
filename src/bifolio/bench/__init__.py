"""Speed and cost measured: of engines in process and of servers, against ceilings and each other."""
