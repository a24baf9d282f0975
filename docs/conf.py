"""The settings of Sphinx. tools/build_site.py prepares the pages and calls it."""

from docutils import nodes

project = html_title = "Distributed training in PyTorch"
extensions = ["myst_nb"]
exclude_patterns = [".*"]
smartquotes = False  # otherwise the two hyphens of a flag become a dash

# The notebooks are shown with the outputs that they are stored with.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_image_options = {"alt": "what the cell above draws"}

myst_heading_anchors = 6  # links to headings, by the names that GitHub gives them
myst_enable_extensions = []  # no formulas: MathJax would come from another host

html_theme = "sphinx_book_theme"
html_theme_options = {
    "footer_content_items": [],
    "home_page_in_toc": True,
    "navbar_persistent": [],
    "show_toc_level": 2,
    "use_download_button": False,
}
html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
# A summary needs a server, and the site can also be read from a folder.
html_show_search_summary = False


def link_line_numbers(_app, doctree):
    """Give line 12 of a script the address #L-12, and link its number to it."""
    for block in doctree.findall(nodes.literal_block):
        if block.get("linenos"):
            block["highlight_args"] |= {"linespans": "L", "anchorlinenos": True}


def setup(app):
    app.connect("doctree-read", link_line_numbers)
