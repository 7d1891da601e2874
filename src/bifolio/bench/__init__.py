"""Speed and cost measured: of engines and servers, against ceilings and against each other."""
