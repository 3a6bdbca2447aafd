"""What every comparison uses: servers under test and their load, children, results, and the page that shows them."""
