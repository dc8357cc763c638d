"""``tierkv demo``: growing conversations on a real engine, with and without tiers.

``scenario`` says what is run · ``model`` makes the model's folder · ``engine`` is the child process that runs one
engine · ``parent`` starts the children, one after the other · ``check`` compares outputs · ``report`` shows it all.
"""
