// A click on a figure, or Enter, shows it in its own size; a click, or Esc, closes it.
document.addEventListener("DOMContentLoaded", () => {
  const large = document.createElement("dialog");
  large.className = "large-figure";
  large.addEventListener("click", () => large.close());
  // the theme stops what Esc does by itself
  large.addEventListener("keydown", (event) => event.key === "Escape" && large.close());
  document.body.append(large);
  for (const image of document.querySelectorAll(".bd-article img")) {
    const enlarge = () => {
      large.replaceChildren(image.cloneNode());
      large.showModal();
    };
    image.tabIndex = 0;
    image.setAttribute("role", "button");
    image.addEventListener("click", enlarge);
    image.addEventListener("keydown", (event) => event.key === "Enter" && enlarge());
  }
});
