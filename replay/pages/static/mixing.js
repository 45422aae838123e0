// The controls among themselves; htmx fetches what they come to.

const form = document.getElementById("controls");

function follow() {
  // Options of a sampler that is not chosen say nothing: they are neither shown nor sent.
  for (const part of form.querySelectorAll("[data-when]")) {
    const [name, value] = part.dataset.when.split("=");
    const applies = form.elements[name].value === value;
    part.classList.toggle("hidden", !applies);
    if (part.tagName === "FIELDSET") part.disabled = !applies;
  }
}

if (form) {
  const slider = document.getElementById("fraction-slider");
  const number = document.getElementById("fraction");
  slider.classList.remove("hidden");
  slider.addEventListener("input", () => { number.value = slider.value; });
  number.addEventListener("input", () => { slider.value = number.value; });
  // Before htmx hears of the change.
  form.addEventListener("change", follow, { capture: true });
  document.getElementById("show").classList.add("hidden");
  follow();
}
