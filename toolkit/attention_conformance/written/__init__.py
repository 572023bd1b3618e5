"""Files about what was found: JUnit for build servers, Markdown, and one page of HTML."""
